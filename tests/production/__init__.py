"""The figures and the facts behind the page "Going to production"."""
