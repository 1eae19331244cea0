"""What an artifact, a weight file, a delta or goldens hold."""
