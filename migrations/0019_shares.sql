-- +goose Up

-- Tasks that a job which is preparing may still write: they count as its key's already.
ALTER TABLE jobs ADD COLUMN reserved BIGINT NOT NULL DEFAULT 0;

-- Ended jobs and confirmations of one key are limited; the oldest are deleted.
CREATE INDEX jobs_owner ON jobs (owner, ended_at, job);
CREATE INDEX job_confirmations_owner ON job_confirmations (owner, until);
