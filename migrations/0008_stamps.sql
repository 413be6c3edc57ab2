-- +goose Up

-- Whether what a node asks other nodes carries a stamp, without which it could
-- be repeated. While a node of before is there, those without one are taken.
ALTER TABLE nodes ADD COLUMN stamps BOOLEAN NOT NULL DEFAULT FALSE;
