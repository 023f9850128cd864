"""What can be seen from outside: subscribers of events. No torch."""
