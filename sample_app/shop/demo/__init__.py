"""Racing copies of one processor, audited by the mails that a real SMTP server took in."""
