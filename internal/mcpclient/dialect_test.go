package mcpclient

import "testing"

func TestRefusal(t *testing.T) {
	for _, c := range []struct {
		code    int64
		message string
		want    Refusal
	}{
		{DefaultErrorCode, "Unknown tool: self.nope", RefusalTool},
		{DefaultErrorCode, "Missing valid argument: volume", RefusalArguments},
		{DefaultErrorCode, "Value exceeds maximum allowed: 100", RefusalArguments},
		{DefaultErrorCode, "Value is below minimum allowed: 0", RefusalArguments},
		{DefaultErrorCode, "Method not implemented: ping", RefusalMethod},
		{DefaultErrorCode, "Failed to capture photo", RefusalOther},
		{-32601, "nix", RefusalMethod},
		{-32602, "nix", RefusalArguments},
	} {
		if got := (&RPCError{Code: c.code, Message: c.message}).Refusal(); got != c.want {
			t.Errorf("%d %q: %q, want %q", c.code, c.message, got, c.want)
		}
	}
}
