"""What runs transactions: they know databases, threads and clocks, and nothing of queues or schedules."""
