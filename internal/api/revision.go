package api

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strconv"
)

// Revision identifies what people may change in a job: its pace, stop rule, deadline and note. It is the ETag of the job
// without quotes.
func (j *Job) Revision() string {
	return revisionOf(j.Spec.Pace, j.Spec.Stop, j.Spec.Note, j.Until)
}

// Revision identifies the settings of a webhook. It is the ETag of the webhook without quotes.
func (w *Webhook) Revision() string { return strconv.FormatInt(w.Version, 10) }

// Revision identifies the state of a key, whose other properties never change. It is the ETag of the key without quotes.
func (k *Key) Revision() string { return revisionOf(k.ID, k.Revoked) }

func revisionOf(values ...any) string {
	text, err := json.Marshal(values)
	if err != nil {
		return "" // of no revision that a client can have
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:8])
}
