-- +goose Up

-- Nodes of the fleet. A node counts as alive while its beat goes on: whoever
-- sees it stand still for the time of a lease declares the node lost. No clock
-- of one machine is ever compared with another's.
CREATE TABLE nodes (
    node       TEXT COLLATE "binary" NOT NULL PRIMARY KEY,
    instance   TEXT NOT NULL,    -- one start of the node
    beat       BIGINT NOT NULL,  -- counts up while it lives
    started_at BIGINT NOT NULL,  -- microseconds
    version    TEXT NOT NULL,
    api        TEXT NOT NULL,    -- base URL of its API
    devices    BIGINT NOT NULL   -- connected
);
