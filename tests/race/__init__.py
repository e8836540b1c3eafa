"""Real processes that race over real rows."""
