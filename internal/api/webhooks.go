package api

// NewWebhook is the request for a webhook.
type NewWebhook struct {
	URL        string   `json:"url" example:"https://example.com/fleetd" doc:"Where events are delivered to, http or https. The address that its host resolves to must be public, or in --webhook-allow."`
	Types      []string `json:"types" nullable:"false" example:"[\"offline\",\"job.halted\"]" doc:"The types of GET /v1/events that are delivered."`
	Select     string   `json:"select,omitempty" example:"room=lab" doc:"Only events of these devices: terms on device and labels, joined by commas. Left out: of all devices that the key is for. Events of jobs are not selected by it."`
	OfflineFor string   `json:"offline_for,omitempty" example:"10m" doc:"Deliver offline only when a device has been offline for this long, from 10s to 30d, and without it at once."`
	Secret     string   `json:"secret,omitempty" doc:"whsec_ and the base64 of 24 to 64 bytes. Left out: the answer has a new one."`
}

// WebhookEdit is a change of a webhook; members left out stay.
type WebhookEdit struct {
	URL        *string   `json:"url,omitempty"`
	Types      *[]string `json:"types,omitempty"`
	Select     *string   `json:"select,omitempty" doc:"Empty: all devices."`
	OfflineFor *string   `json:"offline_for,omitempty" doc:"Empty: at once."`
	Secret     *string   `json:"secret,omitempty" doc:"Empty: the answer has a new one."`
	State      *string   `json:"state,omitempty" enum:"active" doc:"active enables a webhook that was disabled."`
	IfMatch    string    `json:"-"` // the Revision that the change was made from; empty: any
}

// Webhook is one webhook.
type Webhook struct {
	ID           string   `json:"id"`
	URL          string   `json:"url"`
	Types        []string `json:"types" nullable:"false"`
	Select       string   `json:"select"`
	OfflineFor   string   `json:"offline_for"`
	CreatedBy    string   `json:"created_by" doc:"Name of the key as which it acts."`
	CreatedAt    Time     `json:"created_at"`
	State        string   `json:"state" enum:"active,failing,disabled,stopped" doc:"failing: the last attempt failed, and it is tried again; disabled: the receiver accepted nothing for three days; stopped: see reason."`
	Reason       string   `json:"reason" doc:"Why it is disabled or has stopped."`
	Delivered    int64    `json:"delivered" doc:"Deliveries that the receiver accepted."`
	DeliveredAt  Time     `json:"delivered_at" doc:"Of the last one."`
	FailingSince Time     `json:"failing_since"`
	LastError    string   `json:"last_error" doc:"Of the last attempt that failed."`
	Version      int64    `json:"-"` // raised by every change of the settings
}

// CreatedWebhook is a new or changed webhook with its secret.
type CreatedWebhook struct {
	Webhook
	Secret string `json:"secret,omitempty" doc:"Only if it was made for this answer. It is not shown again."`
}

// WebhookTest is the outcome of a test delivery.
type WebhookTest struct {
	Delivered  bool   `json:"delivered"`
	Status     int    `json:"status" doc:"HTTP status of the receiver's answer; 0 without an answer."`
	Error      string `json:"error" doc:"Why it was not delivered."`
	DurationMS int64  `json:"duration_ms"`
}
