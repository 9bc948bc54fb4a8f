"""The PostgreSQL engine: many short transactions on a small pool, and NOTIFY as a hint."""
