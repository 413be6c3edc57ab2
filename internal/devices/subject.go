package devices

import "strings"

// Limits of free text in a subject.
const (
	maxSubjectTokens = 8
	maxSubjectBytes  = 128
)

// NotificationTokens makes an MCP method part of a subject: a leading
// `notifications/` is cut off, `/` separates tokens.
func NotificationTokens(method string) string {
	return SubjectTokens(strings.Split(strings.TrimPrefix(method, "notifications/"), "/")...)
}

// SubjectTokens makes each text one safe subject token: every character
// outside [A-Za-z0-9_-] becomes `_`, empty becomes `_`; at most 8 tokens and
// 128 bytes in all.
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
