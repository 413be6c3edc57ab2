package main

import (
	"fmt"
	"strconv"
	"strings"
)

// fault is one way in which a device misbehaves; a device has a set of them.
type fault uint16

const (
	faultSilent fault = 1 << iota
	faultSlow
	faultLateReply
	faultUnescapedError
	faultCursorLoop
	faultOversizeTool
	faultDupHello
	faultClone
	faultFlap
	faultBadFrame
	faultUDPLoss
	faultUDPReorder
	faultNAT
)

// faultNames is in the order of the documentation.
func faultNames() []string {
	return []string{"silent", "slow", "late-reply", "unescaped-error", "cursor-loop", "oversize-tool",
		"dup-hello", "clone", "flap", "bad-frame", "udp-loss", "udp-reorder", "nat"}
}

func (f fault) has(x fault) bool { return f&x != 0 }

// faultRule gives a fault to the first n devices, or to all when n is negative.
type faultRule struct {
	fault fault
	n     int
}

// parseFaults reads a list like silent,slow:10.
func parseFaults(list string) ([]faultRule, error) {
	var rules []faultRule
	if list == "" {
		return nil, nil
	}
	names := faultNames()
	for item := range strings.SplitSeq(list, ",") {
		name, count, limited := strings.Cut(strings.TrimSpace(item), ":")
		rule := faultRule{n: -1}
		for i, known := range names {
			if known == name {
				rule.fault = 1 << i
			}
		}
		if rule.fault == 0 {
			return nil, fmt.Errorf("--fault: %q is unknown; known are %s", name, strings.Join(names, ", "))
		}
		if limited {
			n, err := strconv.Atoi(count)
			if err != nil || n < 0 {
				return nil, fmt.Errorf("--fault: %q: the part behind the colon is a number of devices", item)
			}
			rule.n = n
		}
		rules = append(rules, rule)
	}
	return rules, nil
}

// faultsOf returns the faults of device number index.
func faultsOf(rules []faultRule, index int) fault {
	var f fault
	for _, r := range rules {
		if r.n < 0 || index < r.n {
			f |= r.fault
		}
	}
	return f
}
