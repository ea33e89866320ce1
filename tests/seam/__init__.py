"""The brain and the movers in two processes: proof that the seam between them carries plain data and nothing else."""
