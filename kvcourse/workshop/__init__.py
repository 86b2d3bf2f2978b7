"""For whoever teaches the course: a room prepared, and the time that its sections take."""
