"""What a run tells about itself: metrics, summary, tables. Imports no other room of the package."""
