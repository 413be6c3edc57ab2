-- +goose Up

-- When a device last had the list, as nodes note about once an hour: one that
-- nobody has had for long, and no history entry names, may be deleted. It is
-- in the row itself to protect a list that is about to be named: the delete reads
-- it again once it has locked the row.
ALTER TABLE catalogs ADD COLUMN used_at BIGINT NOT NULL DEFAULT 0; -- microseconds
UPDATE catalogs SET used_at = first_seen;

-- Which entries name a list.
CREATE INDEX catalog_history_catalog ON catalog_history (catalog COLLATE "binary");
