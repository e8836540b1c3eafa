"""The facts behind the page "Going to production"."""
