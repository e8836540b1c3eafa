"""Models whose instances are not what Django makes of a plain model."""
