"""The SQL of cron runs: definitions, the schedule rows and admission, the life of a run."""
