-- +goose Up

-- When what people decide of a device (whether it is a member, and as whom; its
-- name, labels and transport) was last changed: an older decision does not
-- replace a newer one that another node took meanwhile.
ALTER TABLE devices ADD COLUMN edited_at BIGINT NOT NULL DEFAULT 0; -- microseconds
