-- +goose Up

-- The lease of a webhook ends when its holder does not raise the number for as long as it lasts, by the clock of who watches.
ALTER TABLE webhooks RENAME COLUMN lease_until TO beat;
