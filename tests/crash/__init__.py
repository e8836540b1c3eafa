"""What a crash leaves: real processes, killed at every statement. An app, for the command."""
