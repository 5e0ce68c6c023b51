"""Objects of S3, Google Cloud and Azure as a `Storage`: `object_storage`, on an adapter for each client."""
