-- +goose Up

-- Clients of the device that an operator refused: a JSON array of their Client-Ids;
-- empty: none. A row may exist for them alone, also without a device.
ALTER TABLE credential_exceptions ADD COLUMN refused TEXT NOT NULL DEFAULT '';
