"""Objects of S3, Google and Azure as a storage: `object_storage` above, an adapter for each client below."""
