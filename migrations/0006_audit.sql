-- +goose Up

-- The audit, a row per group of entries. Each row names the
-- hash of the one before it of the same run, so that none can be taken out.
CREATE TABLE audit_blocks (
    run       TEXT COLLATE "binary" NOT NULL, -- one start of one node
    first_seq BIGINT NOT NULL,                -- of the run, from 1
    last_seq  BIGINT NOT NULL,
    node      TEXT NOT NULL,
    first_at  BIGINT NOT NULL,                -- microseconds; the range of the entries' times
    last_at   BIGINT NOT NULL,
    entries   TEXT NOT NULL,                  -- a line of JSON each
    previous  TEXT NOT NULL,                  -- hex; empty for the first row of a run
    hash      TEXT NOT NULL,                  -- SHA-256 over all of the above
    PRIMARY KEY (run, first_seq)
);
CREATE INDEX audit_blocks_by_time ON audit_blocks (last_at, run, first_seq);
