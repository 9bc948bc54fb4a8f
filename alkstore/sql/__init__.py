"""Every statement and every guard: synchronous functions over one open transaction, plain values in and out."""
