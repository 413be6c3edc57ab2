-- +goose Up

-- A webhook that failed for days is not delivered until somebody enables it.
ALTER TABLE webhooks ADD COLUMN disabled_at BIGINT NOT NULL DEFAULT 0; -- microseconds; 0: it is enabled
