-- +goose Up

-- When a device last had the list, as nodes note about once an hour: one that
-- nobody has had for long, and no history entry names, may be deleted. That it
-- stands in the row itself is what protects a list somebody is about to name:
-- the delete looks at it again once it holds the row.
ALTER TABLE catalogs ADD COLUMN used_at BIGINT NOT NULL DEFAULT 0; -- microseconds
UPDATE catalogs SET used_at = first_seen;

-- Which entries name a list.
CREATE INDEX catalog_history_catalog ON catalog_history (catalog COLLATE "binary");
