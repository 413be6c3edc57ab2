-- +goose Up

-- Nodes of the fleet, a row for each start of one: a node that was killed and
-- is back has a lease of its own at once. It counts as alive while its beat goes
-- on: a node that sees no new beat for the time of a lease declares it lost. The
-- clocks of two machines are never compared.
CREATE TABLE nodes (
    node       TEXT COLLATE "binary" NOT NULL,
    instance   TEXT COLLATE "binary" NOT NULL, -- one start of the node
    beat       BIGINT NOT NULL,  -- counts up while it lives
    started_at BIGINT NOT NULL,  -- microseconds
    version    TEXT NOT NULL,
    api        TEXT NOT NULL,    -- base URL of its API
    devices    BIGINT NOT NULL,  -- connected
    PRIMARY KEY (node, instance)
);
