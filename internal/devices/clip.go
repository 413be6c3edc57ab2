package devices

import "strings"

// Clip cuts text that a device reported about itself to maxReportedText bytes.
func Clip(text string) string {
	if len(text) <= maxReportedText {
		return text
	}
	return strings.Clone(strings.ToValidUTF8(text[:maxReportedText], ""))
}

const maxReportedText = 128
