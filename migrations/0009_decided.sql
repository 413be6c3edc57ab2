-- +goose Up

-- When each part of what is decided of a device was last decided, in
-- microseconds: two nodes may decide different parts at once.
ALTER TABLE devices ADD COLUMN client_at BIGINT NOT NULL DEFAULT 0;    -- client_id, admission
ALTER TABLE devices ADD COLUMN name_at BIGINT NOT NULL DEFAULT 0;
ALTER TABLE devices ADD COLUMN labels_at BIGINT NOT NULL DEFAULT 0;
ALTER TABLE devices ADD COLUMN transport_at BIGINT NOT NULL DEFAULT 0; -- preferred_transport
UPDATE devices SET client_at = edited_at, name_at = edited_at, labels_at = edited_at, transport_at = edited_at;
