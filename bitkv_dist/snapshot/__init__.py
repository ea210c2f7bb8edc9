"""The packed cache on disk: saved at one number of ranks, loaded at any other, never half."""
