//go:build brokenfence

package session

const fenced = false
