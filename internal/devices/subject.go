package devices

import "strings"

// Limits of text in a subject.
const (
	maxSubjectTokens = 8
	maxSubjectBytes  = 128
)

// NotificationTokens returns an MCP method as subject tokens: without a leading
// `notifications/`, and with `/` as separator.
func NotificationTokens(method string) string {
	return SubjectTokens(strings.Split(strings.TrimPrefix(method, "notifications/"), "/")...)
}

// SubjectTokens makes each text one safe subject token: characters outside
// [A-Za-z0-9_-] become `_`, empty text becomes `_`; at most 8 tokens and 128 bytes in all.
func SubjectTokens(texts ...string) string {
	var b strings.Builder
	for i, text := range texts {
		if i == maxSubjectTokens || b.Len() >= maxSubjectBytes-1 {
			break
		}
		if i > 0 {
			b.WriteByte('.')
		}
		if text == "" {
			b.WriteByte('_')
		}
		for _, r := range text {
			if b.Len() == maxSubjectBytes {
				break
			}
			if !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '_' || r == '-') {
				r = '_'
			}
			b.WriteRune(r)
		}
	}
	return b.String()
}
