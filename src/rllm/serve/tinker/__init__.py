"""A server that speaks Tinker's API over the local backend."""
