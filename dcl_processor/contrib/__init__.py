"""What joins the core to other packages, each of which is an extra."""
