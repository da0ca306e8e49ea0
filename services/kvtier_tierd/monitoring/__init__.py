"""What operators ask of a service: metrics, and whether it is alive and ready."""
