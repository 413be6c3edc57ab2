package apiclient

import (
	"context"
	"encoding/json"
	"io"
	"iter"
	"net/http"
	"net/url"
	"time"

	"fleetd/internal/api"
)

// Job is a job.
type Job struct {
	api.Job
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Job) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Job, &x.Raw) }

// Task is a job for one device.
type Task struct {
	api.Task
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *Task) UnmarshalJSON(data []byte) error { return withRaw(data, &x.Task, &x.Raw) }

// JobPlan is what a job would do.
type JobPlan struct {
	api.JobPlan
	// Raw is the object as received.
	Raw json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the object as received beside its members.
func (x *JobPlan) UnmarshalJSON(data []byte) error { return withRaw(data, &x.JobPlan, &x.Raw) }

// CreateJob creates a job. With a key that was used with the same job before, it returns that one.
func (c *Client) CreateJob(ctx context.Context, job api.NewJob, key string) (j Job, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	header := http.Header{}
	if key != "" {
		header.Set("Idempotency-Key", key)
	}
	resp, err := c.do(ctx, http.MethodPost, "/v1/jobs", nil, job, header)
	if err != nil {
		return j, err
	}
	content, err := c.readAll(resp)
	if err != nil {
		return j, err
	}
	return j, c.decode(content, &j)
}

// PlanJob returns what a job would do; nothing is created.
func (c *Client) PlanJob(ctx context.Context, job api.NewJob) (plan JobPlan, err error) {
	err = c.into(ctx, longestCall, http.MethodPost, "/v1/jobs", url.Values{"dry_run": {"true"}}, job, &plan)
	return plan, err
}

// Job returns a job.
func (c *Client) Job(ctx context.Context, id string) (j Job, err error) {
	err = c.into(ctx, requestTimeout, http.MethodGet, pathOf("jobs", id), nil, nil, &j)
	return j, err
}

// Jobs returns jobs, newest first; empty filters select all.
func (c *Client) Jobs(ctx context.Context, state, device string) iter.Seq2[Job, error] {
	query := make(url.Values)
	setIf(query, "state", state)
	setIf(query, "device", device)
	return list[Job](ctx, c, "/v1/jobs", query)
}

// DoJob applies a verb: pause with a reason, resume, cancel, retry with outcomes, or advance.
func (c *Client) DoJob(ctx context.Context, id, verb, reason string, outcomes []string) (j Job, err error) {
	body := struct {
		Reason  string   `json:"reason,omitempty"`
		Outcome []string `json:"outcome,omitempty"`
	}{reason, outcomes}
	err = c.into(ctx, requestTimeout, http.MethodPost, pathOf("jobs", id, verb), nil, body, &j)
	return j, err
}

// JobReport writes the tasks of a job as csv or ndjson.
func (c *Client) JobReport(ctx context.Context, id, format string, w io.Writer) (int64, error) {
	return c.download(ctx, pathOf("jobs", id, "report"), url.Values{"format": {format}}, w)
}

// Queue returns the open tasks of a device in their order.
func (c *Client) Queue(ctx context.Context, device string) ([]Task, error) {
	var page api.List[Task]
	err := c.into(ctx, requestTimeout, http.MethodGet, pathOf("devices", device, "tasks"), nil, nil, &page)
	return page.Items, err
}

// CancelTask cancels the waiting task of a job for one device.
func (c *Client) CancelTask(ctx context.Context, device, job string) error {
	return c.into(ctx, requestTimeout, http.MethodPost, pathOf("devices", device, "tasks", job, "cancel"), nil, nil, nil)
}

// CallLater calls a tool, or, if the device is not connected, queues the call for at most later. job is then
// the id of the job, and the result is empty.
func (c *Client) CallLater(ctx context.Context, device, tool string, call CallRequest, later time.Duration, key string) (result CallResult, job string, err error) {
	header := http.Header{}
	if key != "" {
		header.Set("Idempotency-Key", key)
	}
	content, err := c.call(ctx, device, tool, call, later, header)
	if err != nil {
		return result, "", err
	}
	var queued api.QueuedCall
	if err := c.decode(content, &queued); err != nil || queued.Job != "" {
		return result, queued.Job, err
	}
	result.Raw = content
	return result, "", c.decode(content, &result)
}
