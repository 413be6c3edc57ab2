-- +goose Up

-- Waiting tasks of the current round that have begun before: they keep their places in the
-- stage, and started goes on counting them.
ALTER TABLE jobs ADD COLUMN held BIGINT NOT NULL DEFAULT 0;
UPDATE jobs SET held = (SELECT count(*) FROM tasks t WHERE t.job = jobs.job AND t.round = jobs.round AND t.state = 'waiting' AND t.attempt > 0),
                started = (SELECT count(*) FROM tasks t WHERE t.job = jobs.job AND t.round = jobs.round AND t.attempt > 0)
 WHERE ended_at = 0 OR spec LIKE '%"stages"%'; -- one that has ended can be repeated
