"""Measures, a file for each subject: functions from weights by canonical name to arrays, with the papers'
equations."""
