"""What fits on given GPUs, and how fast it decodes: memory as exact integers, times as estimates with named constants."""
