//go:build brokenfence

package devices

const fenced = false
