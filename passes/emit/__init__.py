"""Write each rank's program: schedule the stages, insert send and receive, place collectives, coalesce and overlap them."""
