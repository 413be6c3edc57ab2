package api

// NewWebhook is the request for a webhook.
type NewWebhook struct {
	URL        string   `json:"url" example:"https://example.com/fleetd" doc:"Events are delivered to this URL, http or https. The address that its host resolves to must be public, or in --webhook-allow."`
	Types      []string `json:"types" nullable:"false" example:"[\"offline\",\"job.halted\"]" doc:"The types of GET /v1/events that are delivered."`
	Select     string   `json:"select,omitempty" example:"room=lab" doc:"Only events of these devices are delivered: terms on device and labels, joined by commas. Without it the events of all devices that the key is for are. Events of jobs are not selected by it."`
	OfflineFor string   `json:"offline_for,omitempty" example:"10m" doc:"Deliver offline only when a device has been offline for this long, from 10s to 30d, and without it at once."`
	Secret     string   `json:"secret,omitempty" doc:"The secret is whsec_ and the base64 of 24 to 64 bytes. Without it the answer has a new one."`
}

// WebhookEdit is a change of a webhook; members left out stay.
type WebhookEdit struct {
	URL        *string   `json:"url,omitempty"`
	Types      *[]string `json:"types,omitempty"`
	Select     *string   `json:"select,omitempty" doc:"An empty text selects all devices."`
	OfflineFor *string   `json:"offline_for,omitempty" doc:"An empty text means at once."`
	Secret     *string   `json:"secret,omitempty" doc:"With an empty text the answer has a new one."`
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
	CreatedBy    string   `json:"created_by" doc:"The webhook acts as the key of this name."`
	CreatedAt    Time     `json:"created_at"`
	State        string   `json:"state" enum:"active,failing,disabled,stopped" doc:"failing means that the last attempt failed, and is repeated. disabled means that the receiver accepted nothing for three days. For stopped see the reason."`
	Reason       string   `json:"reason" doc:"It says why it is disabled or has stopped."`
	Delivered    int64    `json:"delivered" doc:"The receiver accepted so many deliveries."`
	DeliveredAt  Time     `json:"delivered_at" doc:"The last one was accepted at this time."`
	FailingSince Time     `json:"failing_since"`
	LastError    string   `json:"last_error" doc:"It is the error of the last attempt that failed."`
	Version      int64    `json:"-"` // raised by every change of the settings
}

// CreatedWebhook is a new or changed webhook with its secret.
type CreatedWebhook struct {
	Webhook
	Secret string `json:"secret,omitempty" doc:"The answer has it only if it was made for it. It is not shown again."`
}

// WebhookTest is the outcome of a test delivery.
type WebhookTest struct {
	Delivered  bool   `json:"delivered"`
	Status     int    `json:"status" doc:"HTTP status of the receiver's answer; 0 without an answer."`
	Error      string `json:"error" doc:"It says why it was not delivered."`
	DurationMS int64  `json:"duration_ms"`
}
