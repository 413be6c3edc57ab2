-- +goose Up

-- Nodes of the fleet, a row for each start of one: a node that was killed and
-- is back has a lease of its own at once. It counts as alive while its beat goes
-- on: whoever sees it stand still for the time of a lease declares it lost. No
-- clock of one machine is ever compared with another's.
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
