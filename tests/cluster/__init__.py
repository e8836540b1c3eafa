"""Real Celery workers and a real beat, on a real Redis; it is a Django app with processors, too."""
