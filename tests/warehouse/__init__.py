"""An app whose processors do what each row's note says; the command is tried out on it."""
