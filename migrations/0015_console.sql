-- +goose Up

-- When a console key ends, whatever its parent does; 0: another key. Rows of console
-- keys are deleted some time after it.
ALTER TABLE api_keys ADD COLUMN console_until BIGINT NOT NULL DEFAULT 0; -- microseconds

-- One-time codes of the console; a row is deleted when the code is used.
CREATE TABLE console_codes (
    hash       TEXT COLLATE "binary" NOT NULL PRIMARY KEY, -- SHA-256 of the code, hex
    document   TEXT NOT NULL,  -- JSON: the key that it gives, without id and token
    expires_at BIGINT NOT NULL -- microseconds
);
