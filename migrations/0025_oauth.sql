-- +goose Up
-- +goose StatementBegin
-- What applications were allowed over MCP (OAuth): the refresh token of each grant, and its last use. The key of a grant, with what it may
-- do, is in api_keys.
CREATE TABLE oauth_grants (
    id         TEXT COLLATE "binary" NOT NULL PRIMARY KEY,  -- of the key
    refresh    TEXT NOT NULL,    -- SHA-256 of the refresh token that is valid, hex
    previous   TEXT NOT NULL,    -- of the one before it; empty: there was none
    rotated_at BIGINT NOT NULL,  -- microseconds; when refresh took the place of previous
    used_at    BIGINT NOT NULL,  -- microseconds
    address    TEXT NOT NULL     -- of the last use
);
-- +goose StatementEnd
