-- +goose Up

-- Whether the requests of a node to other nodes have a stamp, without which they
-- could be replayed. While a node of an older version is there, those without one are accepted.
ALTER TABLE nodes ADD COLUMN stamps BOOLEAN NOT NULL DEFAULT FALSE;
