-- +goose Up

-- API keys, those that have ended included: the audit names them. The token
-- itself is not stored; the document has its SHA-256.
CREATE TABLE api_keys (
    id         TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    document   TEXT NOT NULL,   -- JSON: name, hash, scopes, devices, tools, created, expires
    revoked_at BIGINT NOT NULL  -- microseconds; 0: it was not revoked
);

-- Every version of the tool guard's policy; the highest is in force.
CREATE TABLE policies (
    version  BIGINT NOT NULL PRIMARY KEY,
    document TEXT NOT NULL,     -- JSON
    at       BIGINT NOT NULL,   -- microseconds
    author   TEXT NOT NULL
);
