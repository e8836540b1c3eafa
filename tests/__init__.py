"""The suite; it is a Django app too, so that its models have tables."""
