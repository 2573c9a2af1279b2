"""What `gear_jax.checkpoint` writes and reads."""
